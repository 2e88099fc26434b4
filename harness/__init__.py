"""What any trainer needs: settings, data, files, checkpoints, ranks, console.

Nothing here is specific to QeRL, and you can learn QeRL without reading it.
"""
