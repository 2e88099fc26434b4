"""What any trainer needs: settings, data, files, checkpoints, ranks, console. Nothing here is QeRL's own idea."""
