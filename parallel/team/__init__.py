"""Computation of one tile by several ranks side by side: each member of a team computes its box of every map."""
