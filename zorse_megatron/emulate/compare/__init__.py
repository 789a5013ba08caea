"""Systems compared on one emulated cluster. Without torch."""
