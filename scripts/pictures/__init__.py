"""Draws the pictures of docs/ from the code that training runs (`make pictures`)."""
