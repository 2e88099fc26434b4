"""A package, so that no other package called tools takes its place."""
