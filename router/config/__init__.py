"""Configs of the router and their flags."""
