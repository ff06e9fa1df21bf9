"""The stream and the gram backend as Triton kernels: launchers need torch alone, `*_kernels` need Triton."""
