//! Tokens from and to text.
