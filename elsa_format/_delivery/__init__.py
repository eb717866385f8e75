"""Delivery files: a network level by level, the sparsest in the first bytes (spec/delivery-1.0.md).

`document` and `sequences` say what is where, `payloads` reads a part, `codec` words from its bytes
(`streams` and `pure` where the C module is missing). `prefix` opens what there is of a file,
`reader` gives its tensors, `check` everything that is to hold. `ship` writes delivery files,
`fetch` brings their beginnings.
"""
