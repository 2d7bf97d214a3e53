"""Tables, figures, glued numbers, published runs and the book: what readers see, made from finished runs.

May import everything below it; nothing may import it but the command line and the notebooks.
"""
