"""The study: its runs, and the script that makes its tables and curves."""
