// Included by ProcessGroupGloo.hpp, which uses nothing from it. See README.md beside this file.
#pragma once
