"""Layers.

The suffix of a tensor's name lists its dimensions:

- B: sequences of a batch. S: positions of a sequence. T: tokens of a micro-batch; in attention, keys.
- A: tokens of all expert-parallel ranks.
- D: hidden size. V: vocabulary. H: width of a head.
- I, O: inputs and outputs of a matmul. In experts, I is also the width between their two matmuls.
- N: rows, such as the pairs of token and expert; after B, query heads.
- K: key/value heads; at the end of a name, the experts chosen for a token.
- R: queries of all heads that share a key/value head.
- E: experts. C: places of an expert with limited capacity.
- G: groups, which are the matrices of a grouped matmul, expert-parallel ranks, or the query heads of a
  key/value head.
"""
