"""Check that a run computes the same training in a different layout. The modules in reading order:

capture         hooks that capture the tensors of a training step, of this program or of transformers' GPT-2
trace           global tensors of a run on disk
compare         compares a run with a trace: how large rounding differences can be, and the verdict
report          the table, the operation that caused the first difference, and the HTML page
command         the program: it runs the layouts, and its ranks capture or compare
"""
