"""From an exported program to modules of operators that have lowerings: decomposed, folded, and cut where parts run on the host."""
