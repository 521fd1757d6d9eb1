# Looks for nvcc, and sets MKERNEL_NVCC_FITS. Included once, by the root: CMake knows a language and the
# variables that go with it below the folder that enables it.
if(NOT CMAKE_CUDA_COMPILER)
  find_program(MKERNEL_NVCC NAMES $ENV{CUDACXX} nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH
               PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(MKERNEL_NVCC)
    set(CMAKE_CUDA_COMPILER ${MKERNEL_NVCC})
  endif()
endif()
set(CMAKE_CUDA_ARCHITECTURES 90a-real) # wgmma and setmaxnreg are of this architecture alone
# What other kernels are compiled for: Hopper, and PTX that the driver compiles for any device since 8.0.
set(MKERNEL_CUDA_ARCHITECTURES "90a-real;80-virtual" CACHE STRING
  "Architectures of the kernels that need no wgmma, as of CMAKE_CUDA_ARCHITECTURES")
set(MKERNEL_NVCC_FITS OFF)
if(CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.5)
    set(MKERNEL_NVCC_FITS ON)
  endif()
endif()

set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake before 3.26 does not know that nvcc has it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()

set(MKERNEL_QUICK_KERNEL_OPTIONS "")
if(MKERNEL_QUICK_KERNELS AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0) # older ones may not have it
  set(MKERNEL_QUICK_KERNEL_OPTIONS --Ofast-compile=max)
endif()

function(mkernel_kernels target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${target} PRIVATE -O3 -lineinfo --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra)
endfunction()

# Does the same; what ptxas says of spills, and of products that wait for themselves, stays beside each object. Kernels
# that tests judge by that (tests/unit/hopper/test_kernels_compiled.py), whose names match `judged`, are as they are where
# they run; with MKERNEL_QUICK_KERNELS others have no optimisation, since code without it shows errors as well.
function(mkernel_watched_kernels target judged)
  mkernel_kernels(${target})
  if(MKERNEL_QUICK_KERNELS)
    get_target_property(quick ${target} SOURCES)
    list(FILTER quick EXCLUDE REGEX "${judged}")
    set_source_files_properties(${quick} PROPERTIES COMPILE_OPTIONS "${MKERNEL_QUICK_KERNEL_OPTIONS}")
  endif()
  set(ptxas_words ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/ptxas_words.py ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${ptxas_words}")
endfunction()
