"""Models and their adapters."""
