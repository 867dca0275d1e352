"""msrun's launcher in jobs without a manager."""
