"""What any router knows when it decides: the records, and the code that maintains them."""
