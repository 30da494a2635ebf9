"""Tests, in folders by cost. Packages, so that Ray workers can import from them."""
