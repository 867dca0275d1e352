"""The command line, the only place that puts parts together. Every command imports what it needs when it runs."""
