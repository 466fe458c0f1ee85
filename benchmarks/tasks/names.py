"""Common English and Spanish first and last names: the people who stand in the waiting lines.

A name may be both (James, Thomas): the tokenizer tells them apart by the space before a last name.
"""

_FIRST = """
    Aaron Adam Alan Albert Alexander Alice Amy Andrew Ann Anna Anthony Arthur Austin Benjamin Billy
    Brandon Brian Bruce Carl Carol Charles Charlotte Christian Christopher Daniel David Diana Donald
    Edward Eleanor Elizabeth Emily Emma Eric Frank Gary George Grace Helen Henry Irene Jack Jacob
    James Jason Jean Jennifer Jeremy Jerry Jessica Joe John Johnny Jonathan Jordan Jose Joseph Juan
    Julia Justin Karen Keith Kelly Kevin Kyle Larry Laura Lisa Louis Lucy Maria Mark Martin Mary
    Matthew Michael Michelle Nancy Oliver Patrick Paul Peter Philip Rachel Richard Robert Roger Rose
    Roy Ryan Samuel Sarah Scott Sean Stephen Steven Susan Teresa Thomas Tyler Victoria Virginia
    Walter William
"""

_LAST = """
    Adams Alexander Allen Alvarez Anderson Armstrong Bailey Baker Barnes Bell Bennett Black Boyd
    Brooks Brown Bryant Burke Burns Butler Campbell Carr Carson Carter Castillo Castro Chavez Chen
    Clark Cole Coleman Collins Cook Cooper Cox Crawford Cruz Daniels Davis Diaz Dunn Edwards Ellis
    Evans Fernandez Fisher Flores Ford Foster Fox Franklin Freeman Garcia Gardner Gibson Gomez
    Gonzalez Gordon Graham Gray Green Griffin Hall Hamilton Harris Harrison Harvey Hayes Henderson
    Henry Hernandez Hicks Hill Holmes Howard Hughes Hunt Hunter Jackson James Jenkins Johnson
    Johnston Jones Jordan Kelly Kennedy Kim King Lane Lawrence Lee Lewis Long Lopez Lynch Marshall
    Martin Martinez McDonald Medina Meyer Miller Mills Mitchell Moore Morales Morgan Morris Murphy
    Murray Myers Nelson Nguyen Olson Ortiz Owens Palmer Parker Patel Patterson Payne Perez Perkins
    Perry Peterson Phillips Pierce Porter Powell Price Quinn Ramirez Ramos Reed Reid Reyes Reynolds
    Richardson Riley Rivera Roberts Robertson Robinson Rodriguez Rogers Romero Rose Ross Ruiz
    Russell Ryan Sanchez Sanders Schmidt Scott Shaw Simmons Simpson Smith Snyder Stephens Stevens
    Stewart Stone Sullivan Taylor Thomas Thompson Torres Tran Tucker Turner Wagner Walker Wallace
    Walsh Ward Warren Washington Watson Webb Wells West Wheeler White Williams Wilson Wood Woods
    Wright Young
"""

FIRST_NAMES: tuple[str, ...] = tuple(_FIRST.split())
LAST_NAMES: tuple[str, ...] = tuple(_LAST.split())
