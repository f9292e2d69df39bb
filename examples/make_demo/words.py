"""The small vocabulary that the demo's questions are made of."""

NAMES = tuple(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tom Uma "
    "Victor Wendy Yara Zoe".split()
)

MONTHS = tuple("January February March April May June July August September October November December".split())
DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())

# Nouns with a regular plural in -s.
NOUNS = tuple(
    "apple ball bird boat book bottle bowl bread brick cake camera candle car card carrot cat chair clock "
    "cloud coat coin cookie cow cup desk dog door drum duck egg engine farm flag flower fork frog garden "
    "gate goat guitar hammer hat horse house jar kite lamp leaf lemon letter map melon mirror moon nail "
    "needle onion orange pan paper pear pen pencil pepper phone piano picture pillow plant plate potato "
    "rabbit ring river road robot rock rope rose seed shell ship shirt shoe sock spoon star stone table "
    "tiger train tree truck wheel window".split()
)

WORDS = NOUNS + tuple(
    "baby back bank beach bear bed bell big black blue bone box bridge bright brown bus butter city clean "
    "cold corn dance dark day deep dream dry dust early east face fast field fire fish floor food foot "
    "forest fresh girl glass gold good grass green hair hand happy head heart hill home honey hot ice "
    "king lake land light lion long lunch metal milk mouse music night north ocean oil park party pig "
    "pink pool queen rain red rice room salt sand school sea sheep short silver sister sky sleep slow "
    "small snow soap soft song soup south spring storm story street strong sun tall tea town wall water "
    "wave west white wind wine wolf wood wool yellow".split()
)

# The nouns that code and markup use, without a space before them.
THINGS = tuple(
    "apple ball bird boat book bottle cake camera card carrot cat chair clock coat coin cup dog door duck "
    "egg flower frog garden guitar hat horse house lamp lemon letter map moon orange paper pen phone "
    "picture plant rabbit ring river robot rose ship shoe spoon star table tiger train tree window".split()
)

COLOURS = tuple("black blue brown green orange pink red white yellow silver gold".split())
