"""How far the output of a network can move: LoFAST through modules, certified radii."""
