// The score of a key that a row does not see. Finite, since fast::exp2 need not know infinity; its weight is 0.
#define UNSEEN (-1e30f)
