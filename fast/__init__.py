"""What runs on a GPU in place of plain torch code at the root, and must give the same numbers."""
