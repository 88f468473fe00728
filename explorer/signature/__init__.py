"""Signatures: the type of every tensor of a model, over the family's own sizes, inferred by running
it at several sizes.

A family is built on the meta device with few blocks, several times with all its sizes changed at
once. How an axis changes shows which expression over the sizes it is; every probe has to agree, and
what does not resolve is given as its number and listed. The types are then checked on one run of
the whole model.
"""

from explorer.signature.infer import Known, NoSignature, recorded, signature

__all__ = ["Known", "NoSignature", "recorded", "signature"]
