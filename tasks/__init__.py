"""Problems, and whether an answer to one is right."""
