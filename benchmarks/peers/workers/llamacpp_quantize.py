"""Quantizes a GGUF file with llama.cpp: `llamacpp_quantize.py SOURCE FILE FORM`."""

import argparse

import llama_cpp


def quantize(source: str, file: str, form: str) -> None:
    """Writes a GGUF file.

    Args:
        source: the file to quantize. Its own weights may be quantized.
        file: the file to write.
        form: llama.cpp's name of a mixture of formats, in lower case, such as "q4_k_m".

    Raises:
        ValueError: there is no such form, or llama.cpp fails; its log has the reason.
    """
    number = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form.upper()}", None)
    if number is None:
        raise ValueError(f"llama.cpp has no form {form!r}")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = number
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), file.encode(), params):
        raise ValueError(f"llama.cpp cannot quantize {source} to {form}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("source", "file", "form"):
        parser.add_argument(name)
    quantize(**vars(parser.parse_args()))
