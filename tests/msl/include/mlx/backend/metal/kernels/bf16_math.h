// The bfloat overloads of the math functions are in metal_stdlib.
