"""From text to plain values, strictly: YAML, JSON, CSV, quantities; and how errors spell them."""
