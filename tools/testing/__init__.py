"""Runs the suites of tests, has a second look at what failed, and says in the end what one needs to know."""
