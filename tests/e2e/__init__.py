"""Tests with whole clusters. A package, at whose end the clusters that its files share end."""
