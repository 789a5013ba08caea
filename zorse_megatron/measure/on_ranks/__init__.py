"""What runs on the ranks of a measuring job, with torch."""
