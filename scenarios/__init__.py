"""Scenarios: one module each, and the command line they share."""
