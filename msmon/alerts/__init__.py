"""Alerts: rules that look at the numbers of a step, and what is said and kept when one fires."""
