"""Runs the test suites of trainers with DAF in each of them, and compares them with runs without."""
