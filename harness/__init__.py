"""Everything a run needs besides the method: settings, setup, run folder, memory plan, console.

You can understand QeRL without reading it.
"""
