"""Turns an exported program into modules of operators that have lowerings: decomposed, folded, and cut where parts run on
the host.
"""
