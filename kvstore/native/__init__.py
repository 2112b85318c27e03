"""The C++ source of block keys, and the library that the build makes of it."""
