"""The experiments on real models.

README.md has what they found, runs/ their numbers, results.py makes the tables.
"""
