"""Claims of papers as data, judged on experiments that are trained for them.

    figure_file -> reproduce.train -> columns -> statistics -> verdicts ->
    gallery
                                             \\-> drawing

- `figure_file`: the content of a figure's file, checked with `fields`;
- `columns`: the numbers that claims are about;
- `statistics`: the interval of an effect, from one number for each seed;
- `verdicts`: PASS, FAIL or UNDECIDED for each claim;
- `drawing`: the picture;
- `reproduce`: trains, judges and writes; begin here;
- `gallery`: the page of all figures.
"""
