"""What any trainer needs: settings, a start, a run folder with checkpoints, memory, console.

Nothing here is specific to QeRL, and you can learn QeRL without reading it.
"""
