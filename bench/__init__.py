"""Measurements, as ratios within one run. Never asserted in a test."""
