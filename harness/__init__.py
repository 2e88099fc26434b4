"""What any trainer needs: settings, data, files, checkpoints, ranks, console.

Nothing here is QeRL's own idea, and nobody needs to read it to learn QeRL.
"""
