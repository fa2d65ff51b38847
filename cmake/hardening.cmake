# The compiler's help in what people run: an index or a copy outside its bounds, a return address written over and a table
# of functions written over end the process with a message instead of going on. Included before any target is made.
add_compile_definitions(_GLIBCXX_ASSERTIONS _LIBCPP_HARDENING_MODE=_LIBCPP_HARDENING_MODE_FAST)
if(NOT PI2_SANITIZE AND NOT PI2_BUILD_FUZZ)  # those see more
  # Level 3 knows sizes that are computed; older compilers would warn that they take it as 2.
  set(PI2_FORTIFY 2)
  if((CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12) OR
     (CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12))
    set(PI2_FORTIFY 3)
  endif()
  add_compile_options(-fstack-protector-strong
                      "$<$<NOT:$<CONFIG:Debug>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=${PI2_FORTIFY}>")
endif()
if(NOT APPLE)
  add_link_options(-Wl,-z,relro,-z,now,-z,noexecstack)
endif()
include(CheckPIESupported)
check_pie_supported(LANGUAGES CXX)
