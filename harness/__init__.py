"""What a run needs around the method: settings, a start, a run folder, memory, console.

You can learn QeRL without reading it.
"""
