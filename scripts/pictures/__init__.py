"""The pictures of docs/: every one is drawn from the code that training runs, by `make pictures`."""
