"""Decisions for small machines: pure functions of what was measured, plus the few that touch the process."""
