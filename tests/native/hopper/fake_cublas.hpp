// What the stand-in for cuBLAS was asked for. A test looks `fake_cublas_asked` up in it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

struct AskedProduct {
    void* handle;
    int op_a, op_b, m, n, k;
    float alpha, beta;
    const void* a;
    int type_a, lda;
    const void* b;
    int type_b, ldb;
    void* c;
    int type_c, ldc, compute, algorithm;
    // What the handle had been told by then; cuBLAS' own workspace is null.
    void* stream;
    void* workspace;
    std::size_t workspace_bytes;
};

struct Asked {
    std::vector<AskedProduct> products;
    int handles = 0, streams = 0, workspaces = 0;
    std::string fails;  // the function that returns kFails
};

constexpr int kFails = 13;  // CUBLAS_STATUS_EXECUTION_FAILED
