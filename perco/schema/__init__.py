"""Tables, columns and observers as programs declare them, and as stores record them."""
