"""The method's mathematics: window, clustering, proxy attention, selection. Pure functions."""
