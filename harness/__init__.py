"""What any trainer needs and nobody reads to learn QeRL: settings, data, files, ranks, consoles."""
