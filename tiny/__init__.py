"""A package, so that no other one called tiny comes before it."""
