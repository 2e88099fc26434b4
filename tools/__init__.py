"""A package, so that no other one called tools comes before it."""
